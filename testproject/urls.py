from django.contrib import admin
from django.urls import include, path
from django.views.generic import RedirectView

urlpatterns = [
    path("", include("testproject.reports.urls")),
    path("admin/", admin.site.urls),
    # Browsers ask for it on the admin's pages.
    path("favicon.ico", RedirectView.as_view(url="/static/reports/icon.svg")),
]
