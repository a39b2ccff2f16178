from django.urls import path

from . import views

urlpatterns = [
    path("", views.home, name="home"),
    path("report/", views.report, name="report"),
    path("report/forget/", views.forget_report, name="forget-report"),
    path("sales.csv", views.export_sales, name="export-sales"),
    path("invoices/<int:pk>/send/", views.send_invoice, name="send-invoice"),
]
