from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("", include("testproject.reports.urls")),
    path("admin/", admin.site.urls),
]
